"""Images and models by name, and the bundled model and images."""
