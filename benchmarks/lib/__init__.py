"""What the benchmarks share: the libraries they compare, a language model, measurement, output."""
