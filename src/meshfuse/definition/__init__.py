"""Defining and annotating programs."""
