"""The only caller of a trainer in rounds: what to train, what is affordable, and the training."""
