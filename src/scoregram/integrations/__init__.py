"""Other trainers: their rollouts, rewards and losses, in the words of this library."""
