"""What the Trainer is made of: the onnxruntime session, the state banks, bindings, checkpoints."""
