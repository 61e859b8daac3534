"""Studies of quantized models: accuracy, cost, time, and the levels of quantizers."""
