"""Ops and communications in chunks, one computed while another travels."""
