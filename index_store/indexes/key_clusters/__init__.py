"""Key clusters (Squeezed, Multipole, Tactic): flat and in two levels, built, searched and kept up to date."""
