"""The ledger: what plans cost and what programs do, kept in a file, so that no plan changes unseen.

`entries.json` is the file, `write.py` writes it, `facts` makes an entry, `known_programs` and `drawn` which
programs there are.
"""
