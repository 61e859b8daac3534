"""Studies of quantized models: accuracy, cost, time, figures and the paper's tables."""
