"""The searches of one product's quantizers. Nothing here knows a graph."""
