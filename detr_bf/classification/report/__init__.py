"""Report pages and pictures of classifiers and masked autoencoders."""
