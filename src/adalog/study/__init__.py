"""Studies of quantized models: accuracy, cost, time, figures and the tables of the paper."""
