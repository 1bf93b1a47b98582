"""Trainers and commands that are measured and thrown away, for a tune and a bench: started, watched, ended."""
