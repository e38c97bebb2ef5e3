"""Groups: which devices and processes share statistics, and how processes agree before they do."""
