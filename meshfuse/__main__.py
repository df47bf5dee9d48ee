"""`python -m meshfuse`: the same as the `meshfuse` command."""

from .cli import main

raise SystemExit(main())
