"""The version of the package: `meshfuse.__version__`, and what pip reads."""

__version__ = "0.8.0"
