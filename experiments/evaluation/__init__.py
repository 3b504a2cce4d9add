"""Quality of pictures: the networks whose features are compared, and the statistics of them."""
