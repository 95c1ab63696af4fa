"""From a recipe of pinned inputs to an image digest."""
