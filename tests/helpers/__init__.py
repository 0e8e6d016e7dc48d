"""What several tests share: tiny models and corpora, programs in this process, tables of cases."""
