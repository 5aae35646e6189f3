"""What the preflight shows: findings, tables, estimates."""
