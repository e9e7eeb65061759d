"""Fit the branches of a converted model on data, block by block, so that its trunk follows the original's."""
