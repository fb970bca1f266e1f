"""paceline: PyTorch training on machines of unequal speed."""
