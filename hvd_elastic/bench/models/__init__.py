"""Models of benchmarks and recipes, in plain PyTorch without torchvision or transformers."""
