"""The step loop and what stands in front of it; the only place where integers become tensors."""
