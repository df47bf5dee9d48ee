"""Defining and annotating programs.

`builder` records inputs, ops and outputs, `annotated` what is said of shardings. `FusionDefinition`, which compiles and
runs them, is built on these.
"""
