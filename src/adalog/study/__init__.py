"""Studies of quantized models: accuracy, cost, time and figures."""
