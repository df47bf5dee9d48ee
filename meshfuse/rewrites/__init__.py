"""Graphs with some ops written in other ops, where that makes a better plan. Each module knows one such rewriting."""
