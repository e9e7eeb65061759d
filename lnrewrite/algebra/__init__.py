"""What passes share: changes of basis, placements walked through token by token, gains fitted to samples."""
