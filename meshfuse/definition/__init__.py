"""Defining and annotating programs.

`recording` is what a script has written, as data; the other modules write to it, and `tensor_view` has the values that
scripts compute with. `FusionDefinition`, which compiles and runs a recording, is made of these.
"""
