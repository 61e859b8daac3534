"""Images and models by name, and the model and images that come with the package."""
