"""Front doors: programs of other systems (modules of PyTorch, graphs of aten ops) as definitions with their names."""
