"""Look at what a model's residual streams hold on data: figures by depth, and what they say of a conversion."""
