from varjax.models.loading import names
