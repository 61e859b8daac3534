"""Images and models by name, and what the package bundles of both."""
