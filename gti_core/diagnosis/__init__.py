"""Looking at SID rows before and after fine-tuning: figures, plots and one page for all arms."""
