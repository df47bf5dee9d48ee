"""What a person may ask of a compiled program."""
