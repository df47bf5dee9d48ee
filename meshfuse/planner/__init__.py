"""The search for a plan: from where a program's propagation starts, and which of its plans is taken."""
