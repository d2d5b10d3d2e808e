"""Files of weights into tensors under canonical names."""
