"""What is measured of models: accuracy, cost, time, figures and the paper's tables."""
