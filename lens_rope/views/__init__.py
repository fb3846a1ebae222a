"""Views: results as figures and HTML. A view returns a value, it never displays."""
