"""What a comparison of two models says, in every form that a report has."""
