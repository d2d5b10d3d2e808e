"""KV memory: ``ledger`` (integers, no torch) and ``storage`` (tensors)."""
