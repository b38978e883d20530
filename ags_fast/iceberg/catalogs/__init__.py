"""PyIceberg's catalogs, with encrypted tables."""
