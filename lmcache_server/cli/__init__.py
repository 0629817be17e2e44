"""What a person types: arguments to settings, replies to reports. Each command imports only what it needs."""
