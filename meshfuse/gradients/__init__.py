"""Backward programs: how every op's gradients are written in ops of the table, and the sweep that appends them."""
