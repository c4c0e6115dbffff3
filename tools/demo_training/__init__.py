"""The parts of tools/make_demo_model.py: text, model, training, export, load statistics."""
