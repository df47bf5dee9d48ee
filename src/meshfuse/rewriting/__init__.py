"""Graphs with ops written in other ops, where that makes a better plan: what each stage knows how to rewrite."""
