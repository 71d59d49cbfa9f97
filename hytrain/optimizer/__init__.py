"""What DeepSpeed's engine talks to: gradients taken over, steps in order, hyper-parameters."""
