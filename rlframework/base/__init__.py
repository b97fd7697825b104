"""What every room uses: errors, files, messages, secrets."""
