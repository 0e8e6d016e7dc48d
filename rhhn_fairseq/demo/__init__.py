"""An interactive page: generates text and handwriting live and shows how the weights change meanwhile."""
