"""What a policy does after fine-tuning: its drift, its losses and its success in closed loop."""
