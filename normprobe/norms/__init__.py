"""Identification of norms by behaviour, and the closed forms that they are held against."""
