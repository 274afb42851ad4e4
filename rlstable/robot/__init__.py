"""Robots: environments from an MJCF file and lists of terms, on MJX and on C MuJoCo."""
