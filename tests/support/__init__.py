"""Code that tests share: ranks, tiny models, measures of error, fakes of libraries, scripts."""
